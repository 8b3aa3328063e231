"""Pictures: what is read, what is refused, and what a batch has of them."""

import dataclasses

import numpy as np
import picture_distances
import pytest
from PIL import Image

from jaxstack import data
from jaxstack.config import ConfigError, DataConfig
from jaxstack.data import images
from jaxstack.data.images import ImageReader, Images


def folder(tmp_path, sizes=((4, 6), (4, 6)), mode="L", names=("ant", "bee")):
    """A folder with five pictures of each class; those of class i have the level 10 * i + number."""
    for i, (name, size) in enumerate(zip(names, sizes, strict=True)):
        (tmp_path / name).mkdir()
        for number in range(5):
            level = 10 * i + number
            picture = Image.new(mode, size[::-1], level if mode == "L" else (level, 0, 255))
            picture.save(tmp_path / name / f"{number}.png")
    return DataConfig(source="images", path=str(tmp_path), eval_fraction=0.2)


def test_folders_are_classes_and_levels_become_numbers_from_minus_one_to_one(tmp_path):
    (tmp_path / "grey").mkdir()
    found, classes = images.read_images(folder(tmp_path / "grey"))
    assert classes.names == ("ant", "bee")
    assert classes.image == (4, 6, 1)
    assert found.classes.tolist() == [0] * 5 + [1] * 5
    np.testing.assert_allclose(found.pixels[7], 12 / 127.5 - 1, rtol=1e-6)
    assert found.names[7] == "bee/2.png"
    assert classes.decode(classes.encode("bee ant bee")) == "bee ant bee"
    assert [each.tolist() for each in classes.encode_with_offsets(" bee ant")] == [[1, 0], [1, 5], [4, 8]]
    (tmp_path / "more").mkdir()
    dataset = data.load(folder(tmp_path / "more", mode="RGB"))
    assert dataset.image == (4, 6, 3)
    assert "pictures of 4x6x3 in 2 classes, 8 train, 2 held out" in dataset.description
    assert {*dataset.train.names} | {*dataset.eval.names} == {f"{n}/{i}.png" for n in ("ant", "bee") for i in range(5)}
    rebuilt = data.tokenizer_from_json(dataset.tokenizer.to_json())
    assert (rebuilt.names, rebuilt.image) == (("ant", "bee"), (4, 6, 3))


def npz(tmp_path, name, pixels, labels):
    np.savez(tmp_path / f"{name}.npz", images=pixels, labels=labels)
    return DataConfig(source="images", path=str(tmp_path / f"{name}.npz"))


def test_an_npz_file_has_levels_or_floats(tmp_path):
    levels = np.array([[[[0, 255], [51, 102]]]], np.uint8).reshape(1, 2, 2)
    for pixels in (levels, levels / 255, levels[..., None]):
        found, classes = images.read_images(npz(tmp_path, "a", pixels, np.array([2])))
        np.testing.assert_allclose(found.pixels[0, ..., 0], [[-1, 1], [-0.6, -0.2]], atol=1e-6)
        assert classes.names == ("0", "1", "2")


def test_what_is_refused_is_refused_in_one_line(tmp_path):
    good, zeros = np.zeros((3, 2, 2)), np.zeros(3, int)
    (tmp_path / "mixed").mkdir()
    (tmp_path / "named").mkdir()
    (tmp_path / "text.npz").write_text("no")
    (tmp_path / "broken").mkdir()
    broken = folder(tmp_path / "broken")
    (tmp_path / "broken" / "ant" / "3.png").write_text("no")
    for cfg, said in (
        (folder(tmp_path / "mixed", ((4, 6), (4, 8))), "several sizes: 0.png is 6x4 with 1 channel, 0.png is 8x4 with"),
        (folder(tmp_path / "named", names=("a b", "c")), "'a b' has a space"),
        (broken, "3.png cannot be read"),
        (DataConfig(source="images", path=str(tmp_path / "nowhere")), "does not exist"),
        (DataConfig(source="images", path=str(tmp_path / "broken" / "ant")), "no pictures in folders"),
        (DataConfig(source="images", path=str(tmp_path / "text.npz")), "is not an .npz file"),
        (npz(tmp_path, "floats", good, zeros.astype(float)), "labels (3,) float64"),
        (npz(tmp_path, "negative", good - 1, zeros), "pixels from -1.0 to -1.0"),
        (npz(tmp_path, "one", good[:1], zeros[:1]), "leaves none"),
    ):
        with pytest.raises(ConfigError, match=r"\. [A-Z]") as error:
            images.split_images(images.read_images(cfg)[0], cfg.eval_fraction)
        assert said in str(error.value)
        assert "\n" not in str(error.value)


@pytest.fixture
def reader(rng):
    pixels = rng.uniform(-1, 1, (7, 4, 6, 2)).astype(np.float32)
    return ImageReader(Images(pixels, np.arange(7, dtype=np.int32) % 3, tuple("abcdefg")), 5, 4, 2, 100, 3, 0.5)


def test_a_batch_depends_on_seed_and_step_alone(reader):
    batch = reader.batches()[3]
    assert {name: (a.shape, a.dtype.name) for name, a in batch.items()} == {
        "patches": ((4, 6, 8), "float32"), "noise": ((4, 6, 8), "float32"), "gate_ids": ((4, 6), "int32"),
        "classes": ((4, 6), "int32"), "loss_weights": ((4, 6), "float32"),
    }  # fmt: skip
    for other in (reader.batches()[3], dataclasses.replace(reader).batches(np.arange(4))[3]):
        assert all((other[name] == a).all() for name, a in batch.items())
    part = reader.batches(np.array([1, 3]))[3]
    assert all((part[name] == a[[1, 3]]).all() for name, a in batch.items())
    assert (dataclasses.replace(reader, seed=6).batches()[3]["noise"] != batch["noise"]).all()
    # Rows 12 to 15 of the sequence: the picture of each, by hand.
    order = [np.random.default_rng([5, epoch]).permutation(7) for epoch in (1, 2)]
    where = [order[0][5], order[0][6], order[1][0], order[1][1]]
    np.testing.assert_array_equal(images.from_patches(batch["patches"], (4, 6, 2), 2), reader.images.pixels[where])
    assert (batch["patches"][0, 1, :4] == reader.images.pixels[where[0], 0, 2:4].ravel()).all()  # the second square
    assert reader.describe(3).startswith(f"step 3: {'abcdefg'[where[0]]} at timestep {batch['gate_ids'][0, 0]}; ")


def test_timesteps_fill_the_time_and_classes_are_dropped_by_their_share(reader):
    rows = reader.read(np.arange(10_000))
    steps, classes = rows["gate_ids"][:, 0], rows["classes"][:, 0]
    assert np.abs(np.bincount(steps, minlength=100) - 100).max() <= 3  # independent ones would differ by 30
    for first in (0, 1234):  # so does every batch: each quarter of the time has its share of any 64 rows
        assert np.abs(np.bincount(steps[first : first + 64] // 25, minlength=4) - 16).max() <= 2
    assert (classes == 3).mean() == pytest.approx(0.5, abs=0.02)
    kept = classes < 3
    index = reader.locate(np.arange(10_000))
    assert (classes[kept] == reader.images.classes[index][kept]).all()
    noise = rows["noise"]
    assert abs(noise.mean()) < 0.01
    assert noise.std() == pytest.approx(1, abs=0.01)
    assert np.unique(noise).size > 0.9 * noise.size  # no two rows share their noise


def test_held_out_batches_are_in_order_and_have_all_classes(reader):
    held_out = dataclasses.replace(reader, class_dropout=0.0, shuffle=False).batches(count=3)
    assert len(held_out) == 3
    assert held_out[1]["classes"][:, 0].tolist() == [1, 2, 0, 0]  # pictures 4, 5, 6 and 0 again
    noise = [held_out[i]["noise"] for i in range(3)]
    assert (noise[0][0] != noise[1][3]).all()  # the same picture, with other noise


def test_the_frechet_distance_of_normal_distributions_is_their_closed_form(rng):
    """For commuting covariances it is |m - n|^2 + sum (a - b)^2, with a and b the standard deviations."""
    turn, _ = np.linalg.qr(rng.normal(size=(4, 4)))
    a, b, shift = np.array([1.0, 2.0, 0.5, 0.0]), np.array([3.0, 1.0, 0.5, 0.0]), np.array([0.3, 0, 0, -1])
    draws = rng.normal(size=(500, 4))
    draws = (draws - draws.mean(0)) @ np.linalg.inv(np.linalg.cholesky(np.cov(draws, rowvar=False))).T
    found = picture_distances.frechet_distance(draws * a @ turn, (draws * b + shift) @ turn)
    assert found == pytest.approx(0.09 + 1 + 4 + 1, rel=1e-7)  # roots of rounding errors
    assert picture_distances.frechet_distance(draws, draws) == pytest.approx(0, abs=1e-6)


def test_nearest_distances(rng):
    points, others = rng.normal(size=(9, 3)), rng.normal(size=(5, 3))
    wanted = [min(np.linalg.norm(p - o) for o in others) for p in points]
    np.testing.assert_allclose(picture_distances.nearest_distances(points, others), wanted, rtol=1e-7)


def test_the_digits_of_scikit_learn():
    pytest.importorskip("sklearn")
    dataset = data.load(DataConfig(source="digits", eval_fraction=0.2))
    train, held_out = (picture_distances.to_unit(part.pixels) for part in (dataset.train, dataset.eval))
    assert (len(train), len(held_out)) == (1437, 360)
    assert picture_distances.frechet_distance(train, held_out) == pytest.approx(0.0918, abs=1e-4)
