"""The seam of the Ascend: the native table with the device's formats, context flags and communication."""
