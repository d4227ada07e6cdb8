"""Downloads, from a server that cuts connections, lies and attacks."""

from __future__ import annotations

import gzip
import hashlib
import io
import os
import tarfile
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from trueup_lab.data import download
from trueup_lab.data.corrupted_sets.manifest import Made, Manifest
from trueup_lab.data.download import REMOTES, DownloadError, Remote, fetch, get, unpack


class Server(ThreadingHTTPServer):
    """Serves `files`; cuts the connection after `cut` bytes while `cut` is set; notes ranges asked for."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cut: int | None = None
        self.ranges: list[str | None] = []
        self.resumes = True
        self.chunked = False

    def url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.server_port}/{name}"


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def handle(self):
        self.close_connection = True
        self.handle_one_request()

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.server.ranges.append(wanted)
        content = self.server.files.get(self.path.lstrip("/"))
        if content is None:
            self.send_error(404)
            return
        start = 0
        if wanted and self.server.resumes:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                self.send_error(416)
                return
        self.send_response(206 if start else 200)
        sent = content[start : self.server.cut]
        if self.server.chunked:
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.wfile.write(f"{len(content) - start:x}\r\n".encode() + sent)
            if self.server.cut is None:
                self.wfile.write(b"\r\n0\r\n\r\n")
            return
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        self.wfile.write(sent)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


CONTENT = bytes(range(256)) * 1000
MD5 = hashlib.md5(CONTENT).hexdigest()


def test_a_file_arrives_whole_and_its_progress_is_told(server, tmp_path):
    server.files["a.bin"] = CONTENT
    told = []
    fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5, report=lambda *what: told.append(what))
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert told[0] == ("a.bin", 0, len(CONTENT))
    assert told[-1] == ("a.bin", len(CONTENT), len(CONTENT))


def test_an_interrupted_transfer_goes_on_where_it_stopped(server, tmp_path):
    server.files["a.bin"] = CONTENT
    server.cut = 100_000
    with pytest.raises(DownloadError, match=r"could not download http.* the same command again to resume"):
        fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert not (tmp_path / "a.bin").exists()
    server.cut = None
    fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.ranges == [None, "bytes=100000-"]


@pytest.mark.parametrize("cut", [1, 1000, 255_999])
def test_a_chunked_answer_that_breaks_off_loses_nothing(server, tmp_path, cut):
    server.files["a.bin"], server.chunked, server.cut = CONTENT, True, cut
    with pytest.raises(DownloadError, match=rf"could not download http.* {cut} bytes are kept: run the same command"):
        fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert (tmp_path / "a.bin.part").read_bytes() == CONTENT[:cut]
    server.cut = None
    fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT
    assert server.ranges == [None, f"bytes={cut}-"]


def test_an_interruption_by_the_user_keeps_the_bytes_that_arrived(server, tmp_path):
    server.files["a.bin"] = CONTENT

    def interrupt(_, here, __):
        if here:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5, report=interrupt)
    kept = (tmp_path / "a.bin.part").read_bytes()
    assert kept
    assert CONTENT.startswith(kept)


def test_a_server_that_cannot_resume_starts_again(server, tmp_path):
    server.files["a.bin"], server.resumes = CONTENT, False
    (tmp_path / "a.bin.part").write_bytes(b"something old")
    fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_transfer_that_was_complete_is_not_repeated(server, tmp_path):
    server.files["a.bin"] = CONTENT
    (tmp_path / "a.bin.part").write_bytes(CONTENT)
    fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert (tmp_path / "a.bin").read_bytes() == CONTENT


def test_a_file_with_another_checksum_is_refused_and_not_kept(server, tmp_path):
    server.files["a.bin"] = b"not what was published"
    with pytest.raises(DownloadError, match=f"expected {MD5}"):
        fetch(server.url("a.bin"), tmp_path / "a.bin", md5=MD5)
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_is_not_there_says_so(server, tmp_path):
    with pytest.raises(DownloadError, match="the server answers 404 Not Found. Try again later, or put") as caught:
        fetch(server.url("none"), tmp_path / "none", md5=MD5)
    assert "resume" not in str(caught.value)


def test_without_a_connection_no_bytes_are_reported_as_kept(server, tmp_path):
    url = server.url("a.bin").replace(str(server.server_port), "1")
    with pytest.raises(DownloadError, match=r"could not download .*refused.*Try again, or put the file at"):
        fetch(url, tmp_path / "a.bin", md5=MD5)


def tar_of(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        member = tarfile.TarInfo(name)
        member.size, member.type, member.linkname = (4 if kind == tarfile.REGTYPE else 0), kind, link
        tar.addfile(member, io.BytesIO(b"evil"))
    return buffer.getvalue()


def zip_of(**files: str) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as packed:
        for name, content in files.items():
            packed.writestr(name, content)
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("up.tar", tar_of("../evil")),
        ("link.tar", tar_of("link", tarfile.SYMTYPE, "/etc/passwd")),
        ("up.zip", zip_of(**{"ok": "", "../evil": "evil"})),
        ("absolute.zip", zip_of(**{"/evil": "evil"})),
        ("deep.zip", zip_of(**{"a/../../evil": "evil"})),
        ("drive.zip", zip_of(**{"C:/evil": "evil"})),
    ],
)
def test_archives_that_reach_outside_their_folder_are_refused(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DownloadError, match="was not unpacked"):
        unpack(tmp_path / name, tmp_path / "into")
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_the_folder_around_a_zips_contents_is_left_out_if_it_is_the_sets_name(tmp_path):
    (tmp_path / "a.zip").write_bytes(zip_of(**{"mnist_c/fog/x.npy": "1", "mnist_c/zigzag/x.npy": "2"}))
    unpack(tmp_path / "a.zip", tmp_path / "MNIST-C")
    assert (tmp_path / "MNIST-C" / "zigzag" / "x.npy").read_text() == "2"
    unpack(tmp_path / "a.zip", tmp_path / "other")
    assert (tmp_path / "other" / "mnist_c" / "fog" / "x.npy").exists()


def test_an_archive_that_breaks_off_leaves_nothing_behind(tmp_path):
    whole = zip_of(**{"a/first": "1", "a/second": "2"})
    damaged = whole.replace(b"second2", b"second3")  # the content no longer fits its checksum
    (tmp_path / "a.zip").write_bytes(damaged)
    with pytest.raises(DownloadError, match=r"a\.zip is damaged .*delete it"):
        unpack(tmp_path / "a.zip", tmp_path / "into")
    assert [path.name for path in tmp_path.iterdir()] == ["a.zip"]


def test_unpacking_adds_to_a_folder_that_is_there(tmp_path):
    (tmp_path / "into" / "a").mkdir(parents=True)
    (tmp_path / "into" / "a" / "old").write_text("old")
    (tmp_path / "a.zip").write_bytes(zip_of(**{"a/new": "new", "__MACOSX/a/._new": "junk"}))
    unpack(tmp_path / "a.zip", tmp_path / "into")
    assert {path.name for path in (tmp_path / "into" / "a").iterdir()} == {"old", "new"}
    assert not (tmp_path / "into" / "__MACOSX").exists()


def test_an_unknown_kind_of_archive_is_refused(tmp_path):
    with pytest.raises(DownloadError, match="cannot be unpacked"):
        unpack(tmp_path / "a.rar", tmp_path)


@pytest.fixture
def small_set(server, monkeypatch):
    """A set of one tar and one packed file."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        member = tarfile.TarInfo("set/batch")
        member.size = 5
        tar.addfile(member, io.BytesIO(b"batch"))
    server.files = {"set.tar.gz": buffer.getvalue(), "labels.gz": gzip.compress(b"labels")}
    made = {"set.tar.gz": ("", ("set/batch",)), "labels.gz": ("set", ("set/labels",))}
    remotes = tuple(
        Remote(server.url(name), hashlib.md5(content).hexdigest(), *made[name])
        for name, content in server.files.items()
    )
    monkeypatch.setitem(REMOTES, "small", remotes)


def test_a_set_is_downloaded_once_and_then_used(server, small_set, tmp_path):
    paths = get("small", tmp_path)
    assert [path.read_bytes() for path in paths] == [b"batch", b"labels"]
    assert list((tmp_path / ".downloads").iterdir()) == []
    asked = len(server.ranges)
    assert get("small", tmp_path) == paths
    assert len(server.ranges) == asked


@pytest.mark.parametrize("moved", range(6))
def test_an_interruption_while_files_are_moved_is_noticed_and_continued(server, tmp_path, monkeypatch, moved):
    """Only one of the files is asked for by name; the others must arrive too."""
    content = zip_of(**{f"set/{k}": str(k) for k in range(6)})
    server.files = {"set.zip": content}
    remote = Remote(server.url("set.zip"), hashlib.md5(content).hexdigest(), "set", ("set/0",))
    monkeypatch.setitem(REMOTES, "small", (remote,))
    (tmp_path / "set").mkdir()
    done, replace = [], os.replace

    def interrupted(source, target):
        if ".unpacked" in str(source):
            if len(done) == moved:
                raise KeyboardInterrupt
            done.append(target)
        replace(source, target)

    monkeypatch.setattr("os.replace", interrupted)
    with pytest.raises(KeyboardInterrupt):
        get("small", tmp_path)
    monkeypatch.setattr("os.replace", replace)
    get("small", tmp_path)
    assert {path.name: path.read_text() for path in (tmp_path / "set").iterdir()} == {str(k): str(k) for k in range(6)}
    assert list((tmp_path / ".downloads").iterdir()) == []


def test_two_processes_that_get_one_set_share_one_download(server, small_set, tmp_path):
    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(lambda _: get("small", tmp_path), range(2)))
    assert [path.read_bytes() for path in both[0]] == [b"batch", b"labels"]
    assert server.ranges == [None, None]  # one request per file


def test_a_set_with_a_missing_file_is_not_done(tmp_path):
    """Every file of a published set is looked for, not only some."""
    assert len(REMOTES["mnist-c"][0].makes) == 32
    assert len(REMOTES["cifar10-c"][0].makes) == 20


def test_a_set_that_was_made_here_is_not_taken_for_the_published_one(small_set, tmp_path):
    get("small", tmp_path)
    manifest = Manifest.read(tmp_path / "set")
    get("small", tmp_path)
    manifest.files["batch"] = Made("", 5, 1, 0, [])
    manifest.write()
    with pytest.raises(DownloadError, match="move it away to download the published ones"):
        get("small", tmp_path)


def test_the_command_gets_a_set_and_answers_mistakes_in_a_sentence(call, server, small_set, tmp_path):
    result = call("data", "get", "small", "--data", tmp_path)
    assert result.exit_code == 0, result.output
    assert f"small is at {tmp_path}/set" in result.output
    unknown = call("data", "get", "svhn", "--data", tmp_path)
    assert unknown.exit_code == 2
    assert "unknown data set 'svhn'; known: mnist, cifar10" in unknown.output


def test_an_archive_without_the_expected_files_is_reported(server, small_set, tmp_path, monkeypatch):
    first = REMOTES["small"][0]
    monkeypatch.setitem(REMOTES, "small", (Remote(first.url, first.md5, "", ("set/other",)),))
    with pytest.raises(DownloadError, match="set/other is missing"):
        get("small", tmp_path)


def test_every_published_file_has_a_checksum_and_comes_over_https():
    for remote in (remote for remotes in REMOTES.values() for remote in remotes):
        assert remote.url.startswith("https://")
        assert len(remote.md5) == 32
        int(remote.md5, 16)
        assert remote.makes
    assert download.REMOTES is REMOTES


@pytest.mark.data
@pytest.mark.parametrize("name", ["mnist", "cifar10"])
def test_sets_that_are_there_are_left_alone(name, data_path):
    paths = get(name, data_path("MNIST").parent)
    assert all(path.exists() for path in paths)
