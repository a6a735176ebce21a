import pytest

from kernelbook import claims

CLAIM = '[[claim]]\nid = "A01"\nkind = "speed"\nsays = "fast"\ncheck = "time it"\n'
HEAD = 'title = "An article"\nnotebook = "1_a"\n'


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(claims, "FOLDER", tmp_path)
    return tmp_path


def test_the_articles_are_complete():
    found = {article.name: article for article in claims.articles()}
    assert {name: a.notebook for name, a in found.items()} == {
        "grouped_gemm": "1_grouped_gemm", "prefill_breakdown": "2_prefill_breakdown", "int8_pv": "3_int8_pv"}
    assert [c.id for c in claims.load("grouped_gemm")] == [f"G{i:02}" for i in range(1, 16)]
    assert [c.id for c in claims.load("prefill_breakdown")] == [f"B{i:02}" for i in range(1, 16)]
    assert [c.id for c in claims.load("int8_pv")] == [f"P{i:02}" for i in range(1, 17)]
    g10 = claims.load("grouped_gemm")[9]
    assert (g10.kind, g10.value, g10.where) == ("speed", "about 100 us", "RTX 5090")


def test_notebook_to_claims():
    assert claims.of_notebook("1_grouped_gemm") == claims.load("grouped_gemm")
    assert claims.of_notebook("0_machine") == []


def test_unknown_article_names_the_known():
    with pytest.raises(ValueError, match="'gemm'.*grouped_gemm"):
        claims.load("gemm")


@pytest.mark.parametrize("text, message", [
    (HEAD + CLAIM + CLAIM, "A01 appears twice"),
    (HEAD + CLAIM.replace("speed", "velocity"), "A01: kind 'velocity' is none of speed"),
    (HEAD + CLAIM + 'sayz = "x"\n', "A01: .*'sayz'"),
    (HEAD + CLAIM.replace('says = "fast"\n', ""), "A01: .*'says'"),
    (CLAIM, "'title' is missing"),
    ("claim = [", "a.toml: "),
])
def test_faulty_files_name_file_and_entry(folder, text, message):
    (folder / "a.toml").write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        claims.articles()
    assert "a.toml" in str(error.value)


def test_an_id_belongs_to_one_article(folder):
    (folder / "a.toml").write_text(HEAD + CLAIM)
    (folder / "b.toml").write_text(HEAD + CLAIM)
    with pytest.raises(ValueError, match="A01 appears twice; the first is in a.toml"):
        claims.articles()
