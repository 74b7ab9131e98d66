"""Which nodes share a kernel: values that are computed where they are used, and groups over the same points."""
