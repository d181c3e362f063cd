"""A chat in the terminal. It is a client of the HTTP API, and can start a server."""
