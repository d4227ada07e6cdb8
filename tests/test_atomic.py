"""Files are written whole or not at all, also if several threads write the same one."""

from __future__ import annotations

import threading

from trueup.atomic import write_atomically


def test_threads_that_write_one_file_leave_what_one_of_them_wrote(tmp_path):
    contents, failed = [bytes([k]) * 200_000 for k in range(4)], []

    def work(content):
        try:
            for _ in range(10):
                write_atomically(tmp_path / "file", content)
                assert (tmp_path / "file").read_bytes() in contents
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
