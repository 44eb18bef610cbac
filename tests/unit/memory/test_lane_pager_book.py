from __future__ import annotations

from anybatch.memory.lane_pager import Book


def test_the_first_lane_of_a_segment_shows_it_to_the_others() -> None:
    book = Book()
    book.begin(2, 1)
    assert not book.shown(1, 2)
    book.uses(2, 1, 4, 100)
    numbers = book.used(1)
    book.uses(2, 1, 7, 30)
    assert list(numbers) == [4, 7]  # more come while it is shown
    book.holds(1, 500)
    book.holds(1, 20)
    assert book.most(1, 2) == 0  # it is the one that shows it
    book.begin(1, 1)
    assert book.shown(1, 1)
    book.uses(1, 1, 9, 1)
    assert list(book.used(1)) == [4, 7]
    assert (book.brings(1), book.top, book.most(1, 1)) == (130, 500, 500)
    book.holds(1, 600)  # another lane, or the loss of all of them, may hold more
    book.begin(1, 2)
    book.holds(2, 700)
    assert (book.most(1, 1), book.most(2, 0), book.top) == (600, 700, 700)


def test_what_no_lane_has_done_is_not_recorded() -> None:
    book = Book()
    assert (list(book.used(3)), book.brings(3), book.shown(3, 0)) == ([], 0, False)
