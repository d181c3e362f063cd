"""The native op table: MindSpore's inference primitives. On a CPU, the project's kernels compute the primitives."""
