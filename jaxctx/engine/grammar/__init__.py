"""Grammars: outputs whose text has a given form (`OutputFormat`), by llguidance; and outputs of certain tokens only.

    trial_process.py   a process that compiles a grammar which nobody knows yet, and may crash or be killed at it
    trial.py           `GrammarTrials`: such processes, with a time limit
    compiler.py        `GrammarCompiler`: from an `OutputFormat` to a `Grammar`, once for each tenant and format
    token_rules.py     `TokenRules`: allowed tokens and bad words, of which no grammar is needed
    matcher.py         `OutputMatcher`: which tokens may come next in one output
    mask_worker.py     `MaskWorker`: takes sampled tokens into their matchers beside the steps
    tenant_threads.py  `TenantThreads`: a few threads, of which no tenant takes all

The engine loads the resulting mask into the sampling state of the request's slot before the step that samples. A
request's next row waits until the mask is there; other requests do not. Nothing here knows requests, contexts or steps.
"""
