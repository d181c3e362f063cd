"""The models: graph-mode Cells made of ``agent.layers``, and the table of which checkpoint is which."""
