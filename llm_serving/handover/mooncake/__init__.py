"""Moves the contents of handed blocks with Mooncake's transfer engine (``parallel_config.hand_over_transport``).

The engine runs in a separate process, which maps only the contents of the hand-over pools. Mooncake's ports are open to
everyone who reaches the node. So the process has neither the cluster key nor the headers of the blocks. The node ends
the process after a time limit. This also ends everything that Mooncake still reads or writes.
"""
