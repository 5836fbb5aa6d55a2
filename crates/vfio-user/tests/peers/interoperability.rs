//! Test of the server with the client of the published `vfio_user` crate, which Cloud Hypervisor
//! uses.

use crate::common;
use std::os::fd::AsRawFd;

use common::*;
use shadowbell_vfio_user::server::Limits;

#[test]
fn the_client_of_cloud_hypervisor_is_served() {
    let (_server, path, shared) = Server::with_device(Limits::default());
    // The client connects twice, because the device must be free again after the first connection.
    for _ in 0..2 {
        let mut client = vfio_user::Client::new(&path).unwrap();
        assert_eq!(shared.log(), ["connected, 1 fds"]);

        // The regions are BARs, ROM and configuration space. BAR2 has a mappable part.
        let sizes = [BAR0_SIZE, 0, BAR2_SIZE, 0, 0x1000, 0, 0, 0x1000, 0];
        for (index, size) in (0u32..).zip(sizes) {
            let region = client.region(index).unwrap();
            assert_eq!((region.index, region.size), (index, size));
            assert_eq!(region.file_offset.is_some(), index == 2);
        }
        let mappable = client.region(2).unwrap();
        let areas: Vec<_> =
            mappable.sparse_areas.iter().map(|area| (area.offset, area.size)).collect();
        assert_eq!(areas, [(AREA.offset, AREA.len)]);
        let file = mappable.file_offset.as_ref().unwrap();
        assert_eq!(file.start(), BAR2_FILE_OFFSET);
        assert_eq!(file.file().metadata().unwrap().len(), BAR2_FILE_OFFSET + BAR2_SIZE);

        client.region_write(0, 0x40, &[1, 2, 3, 4]).unwrap();
        let mut data = [0; 8];
        client.region_read(0, 0x3e, &mut data).unwrap();
        assert_eq!(data, [0, 0, 1, 2, 3, 4, 0, 0]);
        let mut identity = [0; 4];
        client.region_read(7, 0, &mut identity).unwrap();
        assert_eq!(identity, [0x34, 0x12, 0x78, 0x56]);

        let info = client.get_irq_info(2).unwrap();
        assert_eq!((info.index, info.count, info.flags & 1), (2, VECTORS, 1));
        // The client sends 16 eventfds in one message, whatever maximum the server has announced.
        let fds = eventfds(16);
        let numbers: Vec<_> = fds.iter().map(AsRawFd::as_raw_fd).collect();
        client.set_irqs(2, 4 | 32, 0, 16, &numbers).unwrap();
        client.set_irqs(2, 1 | 32, 0, 0, &[]).unwrap();

        let memory = memfd(0x10_0000);
        client.dma_map(0, 0x1_0000_0000, 0x10_0000, memory.as_raw_fd()).unwrap();
        client.dma_unmap(0x1_0000_0000, 0x10_0000).unwrap();
        client.reset().unwrap();
        client.region_write(0, 0x40, &[0; 4]).unwrap();
        client.shutdown().unwrap();
        shared.wait_log("disconnected");
        assert_eq!(
            shared.take_log()[1..],
            [
                "Trigger 0+16 with 16 eventfds",
                "Trigger 0+0 with nothing",
                "map 0x100000000+0x100000 rw at 0x0",
                "unmap 0x100000000+0x100000",
                "reset",
                "disconnected",
            ]
        );
    }
}
