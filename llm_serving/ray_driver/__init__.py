"""The Ray driver, a process that places nodes in a Ray cluster, watches them, and replaces lost nodes.

Only this package imports Ray. The server connects to each node directly, so steps are not sent through Ray.
"""
