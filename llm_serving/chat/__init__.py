"""A chat in the terminal: a client of the HTTP API, and a server that it can start."""
