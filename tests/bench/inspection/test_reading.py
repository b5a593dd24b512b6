"""What is read out of machine code, on listings by hand."""

from collections import Counter

from fusedmlp.bench.cards import CARDS
from fusedmlp.bench.inspection.reading import from_code, read

H200 = CARDS["NVIDIA H200"]
# The forms of nvdisasm (with predicates and uniform registers) and of cuobjdump.
SASS = """
.text._kernel:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   S2R R0, SR_TID.X ;                /* 0x0000000000007919 */
        /*0020*/              @P0  LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0030*/              @!P1 LDG.E.U16 R8, desc[UR4][R2.64] ;
        /*0040*/                   LDG.E R9, desc[UR4][R2.64] ;
        /*0050*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0060*/             @UP0  UTMALDG.2D [UR8], [UR4] ;
        /*0070*/                   STG.E.64 desc[UR4][R2.64], R4 ;
        /*0080*/                   EXIT ;
        /*0090*/                   NOP ;
"""


def kernel(sass=SASS, **more):
    arguments = {"threads": 128, "blocks": 4224, "registers": 32, "spill_bytes": 0, "shared_bytes": 0}
    arguments |= {"ptx": "", "elements": 16.0, "itemsize": 2} | more
    return from_code("_kernel", H200, sass=sass, **arguments)


def test_instructions_are_counted_by_what_they_do():
    found = kernel()
    assert found.loads == Counter({16: 1, 2: 1, 4: 1})
    assert found.stores == Counter({8: 1})
    assert found.tensor_core == Counter({"HGMMA": 1})
    assert found.bulk == 1
    assert found.instructions == 9
    assert (found.resident, found.occupancy) == (16, 1.0)


def test_the_words():
    words = "\n".join(read(kernel(sass="        /*0000*/ LDG.E.128 R4, [R2] ;"), sms=132))
    assert "16 bytes at a time, 8 elements an access" in words
    assert "16 elements of each tensor in a thread (thread coarsening)" in words
    assert "4,224 blocks, 2,112 at once on 132 multiprocessors: 2.00 waves" in words
    assert "tensor cores" not in words
    assert "spills" not in words

    narrow = "\n".join(read(kernel(sass="        /*0000*/ LDG.E.U16 R4, [R2] ;", elements=1.0), sms=132))
    assert "widest access 2 bytes" in narrow
    assert "one thread, one element" in narrow

    heavy = "\n".join(read(kernel(spill_bytes=48, registers=255, shared_bytes=200 * 1024), sms=132))
    assert "48 bytes of a thread in local memory" in heavy
    assert "multiplies on tensor cores (1 HGMMA)" in heavy
    assert "moves tiles by TMA" in heavy
    assert "does not fit" in "\n".join(read(kernel(shared_bytes=300 * 1024), sms=132))
