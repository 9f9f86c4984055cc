from jaxctx.engine.drafting.pace import FIRST_DRAFTS, MAX_PAUSE, MORE_DRAFTS, PAUSE_WITHOUT_PAGES, DraftPace


def test_it_guesses_more_while_all_guesses_are_right_and_fewer_after_a_wrong_one() -> None:
    pace = DraftPace()
    assert pace.count(100, 15) == FIRST_DRAFTS
    pace.update(105, FIRST_DRAFTS, FIRST_DRAFTS)
    assert pace.count(105, 15) == FIRST_DRAFTS + MORE_DRAFTS
    assert pace.count(105, 3) == 3
    pace.update(108, 6, 2)
    assert pace.count(108, 15) == 3
    pace.update(110, 1, 1)  # of three only one had a row: that is no reason for fewer
    assert pace.count(110, 15) == 3
    assert pace.count(110, -1) == 0


def test_wrong_guesses_make_ever_longer_pauses_until_one_is_right() -> None:
    pace, length = DraftPace(), 100
    pauses = []
    for _ in range(8):
        pace.update(length, 1, 0)
        pause = next(pause for pause in range(100) if pace.count(length + pause, 15))
        pauses.append(pause)
        length += pause + 1
    assert pauses == [1, 3, 7, 15, 31, MAX_PAUSE, MAX_PAUSE, MAX_PAUSE]
    assert pace.count(length, 15) == 1
    pace.update(length, 1, 1)
    assert pace.count(length, 15) > 0


def test_it_waits_where_there_are_no_pages() -> None:
    pace = DraftPace()
    pace.wait_for_pages(10)
    assert pace.count(10 + PAUSE_WITHOUT_PAGES - 1, 15) == 0
    assert pace.count(10 + PAUSE_WITHOUT_PAGES, 15) == FIRST_DRAFTS


def test_after_its_end_it_guesses_nothing_whatever_comes_of_guesses_before() -> None:
    pace = DraftPace()
    pace.end()
    pace.update(10, 4, 4)
    assert pace.count(1000, 15) == 0
