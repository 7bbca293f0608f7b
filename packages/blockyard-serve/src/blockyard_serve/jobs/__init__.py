"""The engine's side of the server: from a parsed request to the tokens of its completions.

Reading order:

    job              jobs for the engine thread, and the mailbox for their events
    prompt_encoder   text and chats to token ids, in a separate thread
    served_model     sizes of the model and its cache that planning needs
    planner          a request to jobs, within the limits
    queue_slots      queue slots by tenant
    engine_reading   metrics of the engine between two steps
    request_metrics  metrics of requests
    status_line      periodic log line about throughput
    tracing          OpenTelemetry spans of requests
    engine_thread    the thread that steps the engine
    metrics_page     the text of GET /metrics
"""
