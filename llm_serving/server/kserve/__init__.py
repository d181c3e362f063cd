"""The open inference protocol of KServe and Triton (version 2), with its extension for generated text."""
