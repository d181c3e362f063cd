"""HTTP without the meaning of requests: connections, bodies, streams, checks of headers, and their limits."""
