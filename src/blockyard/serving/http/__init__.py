"""The clients' side of the server: connections, paths, and answers on their way out.

Read it in this order:

    body, api_key          a bounded body; the API key
    deadline               the time that a request has, from its arrival
    run                    a client's request from its jobs to its end
    request_log            an id and a line of the log for each request
    streaming              server-sent events, and clients that vanish
    routes, app            the paths
    listening              the address, taken first
    connections, server    uvicorn, slow clients, and the way it stops
"""
