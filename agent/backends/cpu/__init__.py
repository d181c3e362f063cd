"""The CPU's own op table: native, with fused custom operators over the same kernels swapped in."""
