"""The registry of builds."""

from __future__ import annotations

import pytest

from dsv41chat.store import BadName, NotFound, clean_name, free_name


@pytest.fixture
def folder(tmp_path):
    def make(name):
        path = tmp_path / "packs" / name
        path.mkdir(parents=True)
        return path

    return make


def test_names_come_from_folders_and_clashes_get_a_number(store, folder):
    builds = store.builds
    first = builds.add(folder("a/V4.1-Flash"), family="v41", fingerprint="f0")
    second = builds.add(folder("b/V4.1-Flash"))
    third = builds.add(folder("c/V4.1-Flash"))
    odd = builds.add(folder("my pack (4 bit)"))
    nano = builds.add(folder("nano"))
    assert [build.name for build in (first, second, third, odd, nano)] == ["V4.1-Flash", "V4.1-Flash-2", "V4.1-Flash-3", "my-pack-4-bit", "nano-2"]
    assert [build.name for build in builds.list()] == ["my-pack-4-bit", "nano-2", "V4.1-Flash", "V4.1-Flash-2", "V4.1-Flash-3"]
    assert builds.get("V4.1-Flash") == first and (first.family, first.fingerprint, first.last_used) == ("v41", "f0", None)
    assert builds.at(first.folder) == first and builds.get("v4.1-flash") is None


def test_a_folder_is_registered_once(store, folder, tmp_path, clock):
    path = folder("pack")
    first = store.builds.add(path)
    clock.pass_seconds(5)
    link = tmp_path / "link"
    link.symlink_to(path)
    again = store.builds.add(link, family="v4", fingerprint="f1")
    assert again == store.builds.get("pack") and len(store.builds.list()) == 1
    assert (again.name, again.family, again.fingerprint, again.added) == ("pack", "v4", "f1", first.added)
    renamed = store.builds.add(path, "better")
    assert (renamed.name, renamed.family) == ("better", "v4") and store.builds.get("pack") is None


def test_given_names_are_checked(store, folder):
    store.builds.add(folder("one"))
    other = folder("two")
    for bad in ("", "a b", "a/b", "ä", "x\n"):
        with pytest.raises(BadName, match="no name"):
            store.builds.add(other, bad)
    with pytest.raises(BadName, match="taken") as caught:
        store.builds.add(other, "one")
    assert "one-2" in caught.value.hint and caught.value.code == "usage"
    with pytest.raises(BadName):
        store.builds.add(other, "nano")
    assert store.builds.add(other, "V4.1_x-y").name == "V4.1_x-y"


def test_last_used_includes_the_embedded_build(store, folder, clock):
    path = folder("pack")
    assert store.builds.last_used() == []
    used = store.builds.use(path, family="v41", fingerprint="f")
    assert (used.name, used.last_used) == ("pack", clock())
    clock.pass_seconds(1)
    assert store.builds.touch("nano").folder is None
    assert [build.name for build in store.builds.last_used()] == ["nano", "pack"]
    clock.pass_seconds(1)
    store.builds.touch("pack")
    assert [build.name for build in store.builds.last_used()] == ["pack", "nano"]
    assert [build.name for build in store.builds.list()] == ["pack"], "the embedded build is not a registered one"


def test_remove(store, folder):
    store.builds.use(folder("pack"))
    store.builds.remove("pack")
    assert store.builds.list() == store.builds.last_used() == []
    for change in (store.builds.remove, store.builds.touch):
        with pytest.raises(NotFound) as caught:
            change("pack")
        assert caught.value.code == "build_missing"
    with pytest.raises(BadName, match="cannot be removed"):
        store.builds.remove("nano")


def test_name_helpers():
    assert clean_name("漢字") == "build" and clean_name("--a  b--") == "a-b"
    assert free_name("x", {"x", "x-2"}) == "x-3" and free_name("x", set()) == "x"
