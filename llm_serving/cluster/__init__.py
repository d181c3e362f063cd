"""Agents on other machines: the link to a node, the nodes of a server, and the commands of ``llm-serving cluster``.

    server: executor ── RemoteGroup ══ TLS ══ agent_host ── AgentGroup ── agents      (a node)

A node is one process ``agent_host``. It starts the agents of one replica on its machine, with shared memory of that
machine. The server connects to the nodes. As long as a link exists, it belongs to one run of one replica's agents.
"""
