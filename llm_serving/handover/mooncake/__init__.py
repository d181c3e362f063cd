"""Moves the contents of handed blocks with Mooncake's transfer engine (``parallel_config.hand_over_transport``).

The engine runs in a separate process, which maps only the contents of the hand-over pools. Mooncake's ports are open to
everyone who reaches the node. So the process has neither the cluster key nor the headers of the blocks. If a read fails
or takes too long, the node kills the process. Then Mooncake can no longer read or write any block.
"""
