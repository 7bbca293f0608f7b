"""What tests share, none of it a test.

seeds, places, patience             one seed for a run; where the repository stands; how long a test waits
source_only, twin                   the package from its sources, beside the compiled one; one program for both
reference, model_pair               the manager as lists and dicts; the manager and it, driven together
checked, snapshot, busy_manager     a manager that is checked after each call; its whole state; one amid its work
pools, pool_sides, hash_chains      orders of a pool; two pools on one walk; prompts whose hashes collide
policy_models, density_model        each policy once more, slow and obvious
policy_stream, own_policies         all that a pool may tell a policy; policies as users write them
source_rules                        the rules of compiled sources
tiny_models                         models with random weights, as a file too, and their text
attention_steps, paged_kernels      steps for attention backends alone; kernels written out by definition
servers, browser                    real servers, on free ports; a headless browser, driven through a pipe
live_caches                         caches at work, for the page
lab_reference                       traces in memory; caches of named blocks, slow and obvious
made_curves, model_configs          hit-rate curves made by hand; configs of published models
"""
