# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
"""Renders an episode with Blender's Cycles: `python blender_job.py JOB.json`, with an interpreter that has bpy and does not import sparo.

A job contains `bodies` (a list per time), `cameras` (a list of 4 x 4 poses per time), `fov`, `size`, `samples`, `stage`
and `out`, a folder that receives CAMERA_TIME.png. `cycles.py` describes bodies.
"""

import json
import math
import sys
from pathlib import Path

import bpy
from mathutils import Matrix, Vector

_KEY, _SUN, _SKY = (-0.45, -0.55, 0.85), 1.8, 0.6  # direction to the light; strengths of light and sky


def main(path):
    """Render all images of a job file; runs inside an interpreter with bpy."""
    job = json.loads(Path(path).read_text(encoding="utf-8"))
    for number, bodies in enumerate(job["bodies"]):
        _stage(job)
        meshes = {}
        for body in bodies:
            _body(body, meshes)
        for camera, poses in enumerate(job["cameras"]):
            _set_camera(poses[number], job["fov"])
            bpy.context.scene.render.filepath = str(Path(job["out"]) / f"{camera}_{number}.png")
            bpy.ops.render.render(write_still=True)


def _stage(job):
    """Set up an empty file with ground, light and sky."""
    bpy.ops.wm.read_factory_settings(use_empty=True)
    scene = bpy.context.scene
    scene.render.engine = "CYCLES"
    scene.cycles.device, scene.cycles.samples, scene.cycles.seed = "CPU", job["samples"], 0
    scene.cycles.use_denoising, scene.cycles.max_bounces = True, 4
    scene.render.threads_mode, scene.render.threads = "FIXED", job["threads"]
    scene.render.resolution_x = scene.render.resolution_y = job["size"]
    scene.render.resolution_percentage = 100
    scene.render.image_settings.file_format, scene.render.image_settings.color_mode = "PNG", "RGB"
    scene.view_settings.view_transform = "Standard"  # colours unchanged, without a film's tone mapping
    scene.world = bpy.data.worlds.new("sky")
    scene.world.use_nodes = True
    sky = scene.world.node_tree.nodes["Background"]
    sky.inputs["Color"].default_value = (*job["stage"]["sky"], 1.0)
    sky.inputs["Strength"].default_value = _SKY
    lamp = bpy.data.lights.new("key", "SUN")
    lamp.energy, lamp.angle = _SUN, math.radians(4)
    key = bpy.data.objects.new("key", lamp)
    key.rotation_euler = Vector(_KEY).to_track_quat("Z", "Y").to_euler()
    scene.collection.objects.link(key)
    bpy.ops.mesh.primitive_plane_add(size=400)
    _apply_material(bpy.context.object, job["stage"]["ground"], False, job["stage"]["texture"], (1.0, 1.0, 1.0))


def _body(body, meshes):
    shape = body["shape"]
    if shape not in meshes:
        meshes[shape] = _mesh(shape, body)
    solid = bpy.data.objects.new("body", meshes[shape].copy())
    turn = Matrix(body["axes"]).to_4x4()
    size = Matrix.Diagonal((*(body["radius"] * wide for wide in body["stretch"]), 1.0))
    solid.matrix_world = Matrix.Translation(body["centre"]) @ turn @ size
    bpy.context.scene.collection.objects.link(solid)
    _apply_material(solid, body["color"], body["metal"], body["texture"], body["stretch"])


def _mesh(shape, body):
    """Return a solid of `solids.py` as a mesh around the origin."""
    if shape == "sphere":
        bpy.ops.mesh.primitive_uv_sphere_add(segments=64, ring_count=32)
    elif shape == "cube":
        bpy.ops.mesh.primitive_cube_add(size=2)
    elif shape == "cylinder":
        bpy.ops.mesh.primitive_cylinder_add(vertices=96, radius=1, depth=2)
    elif shape == "cone":
        bpy.ops.mesh.primitive_cone_add(vertices=96, radius1=1, depth=2)
    elif shape == "torus":
        bpy.ops.mesh.primitive_torus_add(
            major_segments=96, minor_segments=32, major_radius=body["ring"], minor_radius=body["tube"]
        )
    elif shape == "icosahedron":
        mesh = bpy.data.meshes.new(shape)
        mesh.from_pydata(body["corners"], [], body["faces"])
        return mesh
    elif shape == "monkey":
        parts = []
        for centre, radius in body["spheres"]:
            bpy.ops.mesh.primitive_uv_sphere_add(segments=64, ring_count=32, location=centre, radius=radius)
            parts.append(bpy.context.object)
        bpy.ops.object.select_all(action="DESELECT")
        for part in parts:
            part.select_set(True)
        bpy.context.view_layer.objects.active = parts[0]
        bpy.ops.object.join()
        bpy.ops.object.transform_apply(location=True, rotation=True, scale=True)
    else:
        raise SystemExit(f"{shape}: unknown solid")
    solid = bpy.context.object
    mesh = solid.data.copy()
    if shape in ("sphere", "torus", "monkey"):
        mesh.polygons.foreach_set("use_smooth", [True] * len(mesh.polygons))
    bpy.data.objects.remove(solid)
    return mesh


def _apply_material(solid, color, metal, texture, stretch):
    paint = bpy.data.materials.new("paint")
    paint.use_nodes = True
    nodes, links = paint.node_tree.nodes, paint.node_tree.links
    surface = nodes["Principled BSDF"]
    surface.inputs["Base Color"].default_value = (*color, 1.0)
    surface.inputs["Metallic"].default_value = 1.0 if metal else 0.0
    surface.inputs["Roughness"].default_value = 0.2 if metal else 0.7
    if texture is not None:
        pattern = nodes.new("ShaderNodeTexChecker" if texture["pattern"] == "checker" else "ShaderNodeTexNoise")
        pattern.inputs["Scale"].default_value = texture["scale"]
        mixed = nodes.new("ShaderNodeMix")
        mixed.data_type = "RGBA"
        mixed.inputs[6].default_value, mixed.inputs[7].default_value = (*color, 1.0), (*texture["color"], 1.0)
        place, wide = nodes.new("ShaderNodeTexCoord"), nodes.new("ShaderNodeMapping")
        wide.inputs["Scale"].default_value = stretch  # a wall's bricks are not longer than a cube's
        links.new(place.outputs["Object"], wide.inputs["Vector"])
        links.new(wide.outputs["Vector"], pattern.inputs["Vector"])
        links.new(pattern.outputs["Fac"], mixed.inputs[0])
        links.new(mixed.outputs[2], surface.inputs["Base Color"])
    solid.data.materials.clear()
    solid.data.materials.append(paint)


def _set_camera(pose, fov):
    lens = bpy.data.cameras.new("camera")
    lens.sensor_fit, lens.angle = "VERTICAL", math.radians(fov)
    lens.clip_start, lens.clip_end = 0.01, 1000.0
    eye = bpy.data.objects.new("camera", lens)
    eye.matrix_world = Matrix(pose)
    bpy.context.scene.collection.objects.link(eye)
    bpy.context.scene.camera = eye


if __name__ == "__main__":
    main(sys.argv[-1])
