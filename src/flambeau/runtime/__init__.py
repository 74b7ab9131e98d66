"""One executor runs programs: launch plans, tables of addresses, recordings."""
