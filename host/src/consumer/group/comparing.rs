//! After a lost connection or an ambiguous commit: memory and database are compared, both ways.

use std::sync::atomic::Ordering::Relaxed;

use super::{super::identity::Identity, Group, Step, answered};
use crate::engine::{give_back, held, held_keys};

impl Group {
    pub(super) async fn compare(&mut self, identity: &Identity) -> Step {
        self.must_compare = true; // until it is done
        if let Some(step) = self.end_solo(identity) {
            return step;
        }
        if !self.solo.is_empty() {
            self.solo.stand_aside();
            return Step::Rest; // a settle of its own is under way: neither side is still
        }
        let (database, group) = (self.setting.database.clone(), self.setting.group.clone());
        let (database, group) = (&database, &group);
        let both = async {
            Ok((held(database, identity.host, group).await?, held_keys(database, identity.host, group).await?))
        };
        let (held, keys) = match answered(both).await {
            Ok(both) => both,
            Err(error) => return self.failed_to_compare(&error),
        };
        let differences = self.memory.compare(&held, keys);
        self.free_released();
        self.setting.counters.fenced.fetch_add(differences.fenced as u64, Relaxed);
        if !differences.unknown.is_empty() {
            match answered(give_back(database, identity.host, group, &differences.unknown)).await {
                Ok(count) => {
                    self.setting.counters.given_back.fetch_add(count.unsigned_abs(), Relaxed);
                    tracing::info!(
                        group = &*self.setting.group.name,
                        messages = count,
                        "gave back claims whose answer was lost"
                    );
                }
                Err(error) => return self.failed_to_compare(&error),
            }
        }
        self.must_compare = false;
        self.failures = 0;
        self.not_before = None;
        self.may_have_work = true;
        Step::Again
    }

    fn failed_to_compare(&mut self, error: &crate::database::DatabaseError) -> Step {
        self.back_off("compare what is held with the database", error);
        Step::Rest
    }
}
