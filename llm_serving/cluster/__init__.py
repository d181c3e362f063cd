"""Serves a model with agents on other machines: nodes, the link to a node, and the commands of ``llm-serving cluster``.

    server: executor ── RemoteGroup ══ TLS ══ agent_host ── AgentGroup ── agents      (a node)

A node is one ``agent_host`` process. The server connects to the node and makes a link (a TLS connection). The node then
starts the agents of one replica on its machine. A link serves one run of these agents. If the agents end, the node
closes the link. If the link ends, the node ends the agents.
"""
