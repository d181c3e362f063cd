"""Building blocks of the models: graph-mode Cells that call the backend's op table, no device code."""
