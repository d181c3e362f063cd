"""The parts of HTTP that do not depend on the endpoint: connections, bodies, streams, checks of headers, limits."""
