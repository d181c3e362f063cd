"""Several models at the HTTP edge: the lease of a request, and the commands that start, end and reload models."""
