"""The clients' side of the server: connections, paths, and answers on their way out.

Read it in this order:

    body, api_key             a bounded body; the API key
    hosts, origins            the names under which requests come; web pages of other origins
    run                       a client's request from its jobs to its end, and the time that it has
    request_log               an id and a line of the log for each request; few of the warnings that repeat
    streaming                 server-sent events, and clients that vanish
    service                   what the paths share
    routes, tokenizer_routes, live_routes    the paths
    app                       the application that they make
    listening                 the address, taken first
    connections, server       uvicorn, slow clients, and the way it stops
"""
