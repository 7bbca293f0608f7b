"""The clients' side of the server: connections, paths, and answers on their way out.

Read it in this order:

    body, api_key             a bounded body; the API key
    hosts, origins            the names under which requests come; web pages of other origins
    deadline                  the time that a request has, from its arrival
    run                       a client's request from its jobs to its end
    request_log               an id and a line of the log for each request
    repeated_lines            few of the warnings that clients can cause without end
    streaming                 server-sent events, and clients that vanish
    service                   what the paths share
    routes, tokenizer_routes, check_route, absent_paths    the paths
    app                       the application that they make
    listening                 the address, taken first
    connections, server       uvicorn, slow clients, and the way it stops
"""
