//! Validation of records: the words of a ring or a file are untrusted input.

use plimsoll_flow::PageNumber;

use crate::error::RecordFault;
use crate::record::{Record, VCPUS_MAX};
use crate::{Description, PageLogError};

/// Checks the words of one log in their order.
#[derive(Debug)]
pub(crate) struct Checker {
    name: String,
    /// Instructions executed so far, by vCPU.
    instructions: [u64; VCPUS_MAX],
    intervals: u64,
    records: u64,
}

impl Checker {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            instructions: [0; VCPUS_MAX],
            intervals: 0,
            records: 0,
        }
    }

    /// Valid records so far.
    pub(crate) fn records(&self) -> u64 {
        self.records
    }

    /// Decodes and checks the next word.
    pub(crate) fn record(
        &mut self,
        word: u64,
        machine: &Description,
    ) -> Result<Record, PageLogError> {
        match self.check(word, machine) {
            Ok(record) => {
                self.records += 1;
                Ok(record)
            }
            Err(fault) => Err(self.fault(fault)),
        }
    }

    /// The error of the next record.
    pub(crate) fn fault(&self, fault: RecordFault) -> PageLogError {
        PageLogError::Record {
            name: self.name.clone(),
            number: self.records + 1,
            fault,
        }
    }

    /// The error of a truncated log.
    pub(crate) fn cut(&self) -> PageLogError {
        PageLogError::Cut {
            name: self.name.clone(),
            records: self.records,
        }
    }

    fn check(&mut self, word: u64, machine: &Description) -> Result<Record, RecordFault> {
        let record = Record::decode(word)?;
        match record {
            Record::Walk(walk) => {
                is_of(machine, walk.vcpu)?;
                is_ram(machine, walk.frame)?;
                self.instructions[usize::from(walk.vcpu)] += u64::from(walk.step_instructions);
            }
            Record::Clock { vcpu, instructions } => {
                is_of(machine, vcpu)?;
                let before = &mut self.instructions[usize::from(vcpu)];
                if instructions < *before {
                    return Err(RecordFault::Clock {
                        vcpu,
                        before: *before,
                        instructions,
                    });
                }
                *before = instructions;
            }
            Record::Interval { number } => {
                if number != self.intervals {
                    let expected = self.intervals;
                    return Err(RecordFault::Interval { number, expected });
                }
                self.intervals += 1;
            }
            Record::Mark { vcpu, .. } | Record::Accesses { vcpu, .. } => is_of(machine, vcpu)?,
            Record::Enter { vcpu, frame, .. } | Record::Leave { vcpu, frame } => {
                is_of(machine, vcpu)?;
                is_ram(machine, frame)?;
            }
            Record::End => {}
        }
        Ok(record)
    }
}

fn is_of(machine: &Description, vcpu: u8) -> Result<(), RecordFault> {
    let vcpus = machine.vcpus;
    if u32::from(vcpu) < vcpus {
        Ok(())
    } else {
        Err(RecordFault::Vcpu { vcpu, vcpus })
    }
}

fn is_ram(machine: &Description, frame: PageNumber) -> Result<(), RecordFault> {
    if machine.holds(frame) {
        Ok(())
    } else {
        Err(RecordFault::Frame { frame })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::description::tests::machine;
    use crate::record::Walk;

    fn walk(vcpu: u8, frame: u64, step_instructions: u32) -> u64 {
        let walk = Walk {
            vcpu,
            frame: PageNumber(frame),
            step_instructions,
            write: false,
            fetch: false,
            sets_accessed: false,
            sets_dirty: false,
        };
        Record::Walk(walk).encode()
    }

    #[test]
    fn records_that_cannot_stand_where_they_stand_are_refused_by_number() {
        let mut checker = Checker::new("t");
        let mut fault = |word: u64| {
            let error = checker.record(word, &machine()).unwrap_err();
            error.to_string()
        };
        let hole = walk(0, (3 << 30) >> 12, 0);
        assert_eq!(
            fault(walk(2, 0, 0)),
            "t, record 1: it belongs to vCPU 2, but the machine has only 2"
        );
        assert!(fault(hole).contains("page frame 786432 is outside"));
        for record in [
            Record::Mark { vcpu: 7, id: 1 },
            Record::Accesses { vcpu: 7, count: 1 },
            Record::Clock {
                vcpu: 7,
                instructions: 0,
            },
        ] {
            assert!(fault(record.encode()).contains("vCPU 7"));
        }
        let frame = PageNumber(hole & 0xffff_ffff);
        for record in [
            Record::Leave { vcpu: 0, frame },
            Record::Enter {
                vcpu: 0,
                frame,
                write: true,
            },
        ] {
            assert!(fault(record.encode()).contains("outside"));
        }
        assert!(fault(7 << 61 | 1).contains("is no record of a page log"));
        let interval = |number| Record::Interval { number }.encode();
        assert!(fault(interval(1)).contains("interval 1 ends where interval 0 is expected"));
        assert!(checker.record(interval(0), &machine()).is_ok());
        assert!(checker.record(interval(0), &machine()).is_err());
        assert_eq!(checker.records(), 1);
    }

    #[test]
    fn a_clock_counts_from_the_walks_before_it() {
        let mut checker = Checker::new("t");
        let machine = machine();
        let clock = |instructions| {
            let vcpu = 1;
            Record::Clock { vcpu, instructions }.encode()
        };
        assert!(checker.record(clock(100), &machine).is_ok());
        assert!(checker.record(walk(1, 0, 50), &machine).is_ok());
        assert!(checker.record(clock(150), &machine).is_ok());
        let error = checker.record(clock(149), &machine).unwrap_err();
        assert!(error.to_string().contains("has run 150 instructions"));
    }
}
