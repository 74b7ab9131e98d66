"""The machines: compile text, allocate, launch."""
