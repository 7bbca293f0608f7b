"""The clients' side of the server: connections, routes and responses.

Reading order:

    access           allowed hosts, web origins and API keys
    body             request bodies, limited in size and time
    request_run      one client's request, from its jobs to its end or its deadline
    request_log      request ids and the log
    streaming        server-sent events
    service          the parts that the routes share
    routes           routes of OpenAI's and vLLM's APIs, probes and metrics
    live_routes      the page under /ui
    server_options   options of the server and of the application
    app              the application that combines them
    listening        sockets, opened before the model is loaded
    server           uvicorn: connection timeouts and shutdown
"""
