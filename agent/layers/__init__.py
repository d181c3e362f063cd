"""The building blocks of models: MindSpore Cells that use a device only through the op table."""
