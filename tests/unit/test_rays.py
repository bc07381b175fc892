"""Points along rays, and what networks get as their positions."""

import torch
from torch.nn import functional as F

from object_centric.scenes3d.nerf import NerfConfig
from object_centric.scenes3d.rays import RayPointsConfig, Rays
from object_centric.scenes3d.scene_model import SceneModelConfig

BOX = ((-2.0, -3.0, 0.0), (2.0, 3.0, 1.0))


def test_points_on_rays_lie_inside_the_box():
    torch.manual_seed(0)
    module = NerfConfig(bins=5, sky=True, box=BOX).build(24)
    eyes, aims = (
        4 * torch.randn(1, 300, 3),
        torch.rand(1, 300, 3) * torch.tensor([4.0, 6.0, 1.0]) - torch.tensor([2.0, 3.0, 0.0]),
    )
    aims[:, ::3] += 9  # these miss the box
    aims[:, 1] = eyes[:, 1] - torch.tensor([0.0, 0.0, 5.0])  # along an axis
    rays = Rays(eyes, F.normalize(aims - eyes, dim=-1), torch.rand(1, 300))
    near, far = module.near_far(rays)
    for t in torch.linspace(0.51, 19.9, 400):  # points inside the box
        at = eyes + t * rays.directions
        inside = ((at >= torch.tensor([-2.0, -3.0, 0.0])) & (at <= torch.tensor([2.0, 3.0, 1.0]))).all(-1)
        between = (near - 1e-4 <= t) & (t <= far + 1e-4)
        assert (inside <= between).all() and (((near + 1e-4 < t) & (t < far - 1e-4)) <= inside).all()
    missed = far - near == 0
    assert 50 < missed.sum() < 250
    drawn = module(torch.randn(1, 3, 24), rays)
    sky = module.sky(module.sample_points(rays).directions).sigmoid()
    # Everything beyond the far end of a scene belongs to the sky, so such a scene is not refused.
    ends = [SceneModelConfig(decoder={"kind": "nerf", "sky": sky}).bounds for sky in (True, False)]  # type: ignore[arg-type]
    assert ends == [(0.5, float("inf"), None), (0.5, 20.0, None)]
    assert torch.allclose(drawn.colours[missed], sky[missed], atol=1e-6) and (drawn.shares[missed][:, :3] == 0).all()


def test_a_point_on_the_ground_has_one_embedding_for_all_cameras():
    points = RayPointsConfig(by="height", near=0.0, far=1.0, count=2, reach=6.0, fourier_bands=2)
    target, eyes = torch.tensor([1.5, -2.0, 0.0]), torch.tensor([[4.0, 1.0, 7.0], [-3.0, -3.0, 5.0], [1.5, -2.0, 9.0]])
    told = points.embed(eyes, F.normalize(target - eyes, dim=-1))
    assert told.shape == (3, points.width)
    assert torch.allclose(told[:, :2], (target[:2] / 6).expand(3, 2), atol=1e-5)
    assert not torch.allclose(told[0, 2:4], told[1, 2:4], atol=0.01)  # one unit above, positions differ
    level = points.embed(torch.tensor([[0.0, 0.0, 2.0]] * 2), torch.tensor([[1.0, 0.0, 0.0], [1.0, 0.0, 1e-9]]))
    assert level.isfinite().all() and level[:, :4].abs().max() == 1  # horizontal rays are clamped to the edge
    along = RayPointsConfig(near=2.0, far=6.0, count=3, reach=10.0, fourier_bands=1)
    found = along.embed(torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 1.0, 0.0]))
    at = torch.tensor([[1.0, 2, 0], [1, 4, 0], [1, 6, 0]])
    angles = torch.pi * at / 10
    assert torch.allclose(
        found, torch.cat([at.flatten() / 10, torch.stack([angles.sin(), angles.cos()], -1).flatten()])
    )
