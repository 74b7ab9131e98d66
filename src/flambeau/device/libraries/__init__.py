"""Support for other libraries: their operators, and how they choose a device."""
