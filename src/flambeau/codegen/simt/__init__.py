"""One set of writers for the C languages of GPUs; a dialect is a table over them."""
