"""A fleet: engines in replicas of Ray Serve, with one address in the process that started them.

Reading order:

    replica_request   a job on its way to a replica
    replica           an engine in a separate process
    shared            the router's state, shared by the ingress and Ray's routers of a process
    ray_serve         the request router for Ray Serve
    fleet_metrics     claimed and true hits; GET /metrics and GET /fleet
    dispatcher        sends jobs to replicas, and to another one if theirs is lost
    app               the application: a server's routes and those of a fleet
    ingress           the application in a replica of Ray Serve
    token_load        autoscaling by load in tokens
    leftovers         cleanup of a fleet's processes, even if the command is killed
    cluster           a local Ray, started and stopped

Needs `pip install 'blockyard[fleet,serve]'`.
"""
