"""Runs programs: the executor, launch plans, address tables, CUDA graph recordings."""
