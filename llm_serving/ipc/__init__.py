"""Communication between server and agents: typed messages on a socket, step slots in shared memory."""
