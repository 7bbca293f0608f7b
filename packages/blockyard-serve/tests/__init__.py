"""Tests of `blockyard_serve`.

    serving    the HTTP server: answers, fields, paths, bad requests, failures, its log, metrics and traces, load
    live       the page: states, the wire, its paths, and the page itself in a headless browser
    fleet      answers whose replicas are lost, choices over real publishers, `blockyard fleet serve` (extra `fleet`)
    metrics    the dashboard and the alerts that ship
    cli        options of the server
    interop    a fleet on Ray (`make interop-ray`)

`python -m tests.fleet.chaos` kills and stops replicas of a fleet; `python -m tests.pictures FOLDER` takes the pictures
of docs/page.md again.
"""
