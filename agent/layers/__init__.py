"""The building blocks of models: MindSpore Cells whose operators come from the op table of the device."""
