"""The engine's side of the server: from a request that was read to the tokens that the engine made for it.

Read it in this order:

    job              what goes to the engine thread and what comes back
    prompts          text and chats to token ids, in a thread of their own
    served_model     what plans ask of an engine, as values
    planner          from a client's request to jobs, within the limits
    engine_reading   the engine between two steps, for Prometheus
    request_figures  what became of requests, for Prometheus
    status_line      a line in the log every few seconds of work
    tracing          spans of requests, for OpenTelemetry
    recovery         who made a step fail, found by trying each request alone
    engine_thread    the one thread that steps the engine
    metrics_page     what Prometheus gets
"""
