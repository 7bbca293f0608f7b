"""A fleet is engines in replicas of Ray Serve, and one address before them, in the process that started them.

Read it in this order:

    asks        what goes to a replica
    replica     an engine in a process of its own
    figures     claims of hits and what came true; what /metrics and /fleet show
    dispatcher  jobs to replicas, and on to another one where theirs is lost
    app         the application: the paths of a server, and those of a fleet
    remains     which processes belong to a fleet, and their end, also where the command was killed
    cluster     Ray on this machine alone, begun and ended

Needs `pip install 'blockyard[fleet,serve]'`.
"""
