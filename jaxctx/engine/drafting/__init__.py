"""Drafting: a small model guesses what the served model will draw, and a step of the served model checks the guesses.

    sequences  what the draft model has computed of each request: its own contexts in its own pages, no arrays
    draft_model  the steps of the draft model: one behind another, without waiting for the host between them
    pace       how many tokens a request has drafted, and when it has none for a while
    sizes      the configuration of the draft model's runner and pages
    vocabulary whether two models mean the same tokens by the same ids

Both models draw with the same noise. It is a function of seed, position and token id (`model.token_sampling`), and the
draft model draws with the seed, the position and the options that the served model will draw with: a token counts if
both drew the same one. So the tokens of a request are those that it has without a draft model, greedy or not, whatever
the draft model is: it decides how many steps they take, and nothing else. A draft model with the distribution q is
right at a token of the distribution p with a probability of

    sum over i of 1 / (sum over j of max(p_j / p_i, q_j / q_i))  >=  (1 - d) / (1 + d)

d being their total variation distance (M. Daliri, C. Musco, A. T. Suresh, Coupling without Communication and
Drafter-Invariant Speculative Decoding, 2024). Rejection sampling (Y. Leviathan, M. Kalman, Y. Matias, 2023) is right
with 1 - d, a little more often, and draws from p as well. But its tokens depend on what the draft model guessed: the
same seed would give other tokens with another draft model, with a full pool of pages, or beside other requests. Here
equal seeds stay equal tokens.

Nothing here waits, and a draft model that has no page or no time for a request is no error: the request has no drafts.
Used by the scheduler (`sequences`) and by the engine core (`draft_model`), on the step thread.
"""
