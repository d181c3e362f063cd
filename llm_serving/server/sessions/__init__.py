"""Sessions at the HTTP edge: list, export, import and forget conversations."""
