// SPDX-License-Identifier: GPL-2.0-only
/*
 * Lamina: memory that a device maps into its shared-memory region on request.
 *
 * A virtio device has a region in a PCI BAR, with nothing in it at first, and
 * a queue (queue.c) by which ranges of two windows are put into it. Programs
 * have them through /dev/laminaN (file.c, lamina_uapi.h).
 */

#include <linux/idr.h>
#include <linux/ioport.h>
#include <linux/module.h>
#include <linux/slab.h>

#include "lamina.h"

static DEFINE_IDA(lamina_numbers);

static int lamina_configure(struct lamina *lamina)
{
	struct virtio_device *vdev = lamina->vdev;
	struct lamina_config config;

	virtio_cread_bytes(vdev, 0, &config, sizeof(config));
	if (le64_to_cpu(config.magic) != LAMINA_MAGIC)
		return -ENODEV;
	if (le64_to_cpu(config.version) != LAMINA_PROTOCOL_VERSION) {
		dev_err(&vdev->dev, "the device speaks version %llu, this driver %d\n",
			le64_to_cpu(config.version), LAMINA_PROTOCOL_VERSION);
		return -ENODEV;
	}
	lamina->base_bytes = le64_to_cpu(config.base_bytes);
	lamina->views_bytes = le64_to_cpu(config.views_bytes);

	if (!virtio_get_shm_region(vdev, &lamina->region, LAMINA_REGION) ||
	    lamina->region.len < BIT(LAMINA_ORDER)) {
		dev_err(&vdev->dev, "the device has no shared-memory region\n");
		return -ENODEV;
	}
	if (!devm_request_mem_region(&vdev->dev, lamina->region.addr,
				     lamina->region.len, "lamina"))
		return -EBUSY;

	/* The pool's addresses are offsets, but that nothing is at 0. */
	lamina->places = gen_pool_create(LAMINA_ORDER, dev_to_node(&vdev->dev));
	if (!lamina->places)
		return -ENOMEM;
	return gen_pool_add(lamina->places, BIT(LAMINA_ORDER),
			    lamina->region.len, dev_to_node(&vdev->dev));
}

static int lamina_probe(struct virtio_device *vdev)
{
	struct lamina *lamina;
	int err;

	if (!virtio_has_feature(vdev, VIRTIO_F_VERSION_1))
		return -ENODEV;
	lamina = kzalloc(sizeof(*lamina), GFP_KERNEL);
	if (!lamina)
		return -ENOMEM;
	kref_init(&lamina->kref);
	mutex_init(&lamina->queue_lock);
	mutex_init(&lamina->map_lock);
	mutex_init(&lamina->lock);
	INIT_LIST_HEAD(&lamina->mappings);
	INIT_LIST_HEAD(&lamina->files);
	init_completion(&lamina->answered);
	lamina->vdev = vdev;
	vdev->priv = lamina;

	lamina->number = ida_alloc(&lamina_numbers, GFP_KERNEL);
	err = lamina->number;
	if (err < 0)
		goto put;
	err = lamina_configure(lamina);
	if (err)
		goto number;
	err = lamina_queue_init(lamina);
	if (err)
		goto number;
	virtio_device_ready(vdev);
	/* A driver before this one may have left mappings. */
	err = lamina_do(lamina, LAMINA_OP_RESET, 0, 0, 0, 0);
	if (err)
		goto queue;

	snprintf(lamina->name, sizeof(lamina->name), "lamina%d", lamina->number);
	lamina->misc.minor = MISC_DYNAMIC_MINOR;
	lamina->misc.name = lamina->name;
	lamina->misc.fops = &lamina_fops;
	lamina->misc.parent = &vdev->dev;
	err = misc_register(&lamina->misc);
	if (err)
		goto queue;
	dev_info(&vdev->dev, "%s: base %llu, views %llu, region %llu MiB\n",
		 lamina->name, lamina->base_bytes >> 20,
		 lamina->views_bytes >> 20, lamina->region.len >> 20);
	return 0;

queue:
	virtio_reset_device(vdev);
	lamina_queue_free(lamina);
number:
	ida_free(&lamina_numbers, lamina->number);
put:
	kref_put(&lamina->kref, lamina_release);
	return err;
}

static void lamina_remove(struct virtio_device *vdev)
{
	struct lamina *lamina = vdev->priv;

	misc_deregister(&lamina->misc);
	lamina_zap(lamina);
	/* Whoever is in a request ends first; nobody begins another one. */
	mutex_lock(&lamina->queue_lock);
	lamina->broken = true;
	virtio_reset_device(vdev);
	lamina_queue_free(lamina);
	mutex_unlock(&lamina->queue_lock);
	ida_free(&lamina_numbers, lamina->number);
	kref_put(&lamina->kref, lamina_release);
}

static const struct virtio_device_id lamina_ids[] = {
	{ LAMINA_VIRTIO_ID, VIRTIO_DEV_ANY_ID },
	{ 0 },
};
MODULE_DEVICE_TABLE(virtio, lamina_ids);

static struct virtio_driver lamina_driver = {
	.driver.name = KBUILD_MODNAME,
	.id_table = lamina_ids,
	.probe = lamina_probe,
	.remove = lamina_remove,
};
module_virtio_driver(lamina_driver);

MODULE_DESCRIPTION("Lamina: windows mapped into virtio shared memory");
MODULE_LICENSE("GPL");
