"""POST /v1/decisions, as the OpenAI API has it: many short questions about one input, one fork each.

    app.py          the path
    request.py      a JSON body to what it asks for
    prompt.py       the input and the questions as the model reads them
    choice_tree.py  choices as a tree of tokens, and their probabilities
    answering.py    one fork for each question: scored, or continued
    answers.py      answers as JSON
    usage.py        what the questions have cost
    create.py       all answers of a request, whole or as server-sent events
    openapi.py      the description of the path

    input ──fill once──▶ context ──fork──▶ question 1 ──Forward over its choices──▶ their probabilities
                                 ├─fork──▶ question 2 ──Generate──▶ text
                                 ...

A question with choices generates nothing. One Forward computes the question and, behind it, all choices as a tree: each
token sees the question and the beginning of its own choice, and no other choice. So the log probability of a choice is
exactly that of its tokens behind the question, however long it is and however many there are.
"""
