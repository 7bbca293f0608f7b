"""The repository's own tests. Each package has its tests beside it, in packages/NAME/tests.

    package        every source of every package: size, docstrings, which package imports which, public names; wheels
    docs           what the README, the pages and the docstrings show runs; links; the site
    benchmarks     what the benchmarks measure with: aged pools, traces, builds in turns
    cli            the list of commands, and what they say without an extra
    integrations   the adapters in examples/engines, without their engines
    interop        the same with their engines; requirements of the environments that `make interop-...` makes
    engine, serving   programs of benchmarks/ against a small model

What tests of several packages share is `blockyard_testing`, in testing/. Programs: `python -m tests.wheels` (builds
wheels, and tests each where there is no compiler), `python -m tests.frame_rate` (how often the page draws).
"""
