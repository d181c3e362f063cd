"""Shadow serving at the HTTP edge."""
