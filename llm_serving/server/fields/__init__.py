"""The fields of request bodies that several endpoints share, and the errors for wrong values."""
