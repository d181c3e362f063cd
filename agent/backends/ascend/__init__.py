"""The Ascend backend: the native op table with the device's limits, context settings, memory and communication."""
